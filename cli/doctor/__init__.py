"""`cupyflash doctor`: looks at what the machine has."""
