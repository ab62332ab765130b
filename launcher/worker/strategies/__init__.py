"""How one model runs on several devices: `single`, `ddp` and `dp`."""
