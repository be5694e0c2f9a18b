"""The functions of Python that mirror the commands, one file each."""
