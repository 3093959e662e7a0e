"""The version of cupyflash, which others ask for as `cupyflash.__version__`."""

VERSION = "0.1.0"
