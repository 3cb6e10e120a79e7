"""`python -m foreplan` is the program `foreplan`."""

from foreplan.cli import main

main()
