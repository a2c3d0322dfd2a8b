"""`python -m onfoot` is the command `onfoot`."""

from onfoot.cli import main

if __name__ == "__main__":
    main()
