"""`python -m kvrepro`: the command line."""

from kvrepro.cli import main

if __name__ == "__main__":
    __package__ = ""  # programs that look up their name find `kvrepro`, as behind the console script
    main()
