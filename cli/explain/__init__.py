"""`cupyflash explain`: says what a call would do and why."""
