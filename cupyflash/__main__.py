"""``python -m cupyflash``: the command line."""

from cupyflash.cli import main

if __name__ == "__main__":  # processes started by spawn import this module again
    main(prog_name="cupyflash")
