"""How one model runs on several devices: a class for each strategy of `launcher/strategies.py`."""
