"""A rank's access to its devices: `runtime` is the interface, `cpu` and `cuda` are a kind of device each."""
