"""Run the command `mpidl` as `python -m mpidl`."""

from mpidl_command import main

if __name__ == "__main__":
    main()
