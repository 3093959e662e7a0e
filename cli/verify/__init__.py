"""`cupyflash verify`: proves this machine's results."""
