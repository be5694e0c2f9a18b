"""Speed, and whether this machine is fit."""
