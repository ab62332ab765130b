"""`gpurun` and `python -m launcher`."""

from launcher.cli import main

if __name__ == "__main__":
    main()
