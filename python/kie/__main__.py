"""`python -m kie`."""

from kie.cli import main

if __name__ == "__main__":
    main()
