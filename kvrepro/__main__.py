"""`python -m kvrepro`, and the console script: the command line."""

from typing import Any

from kvrepro.errors import program


def main() -> None:
    """Run the command line. It is imported where an interrupt is already one line."""

    def app(*arguments: Any, **settings: Any) -> Any:
        from kvrepro.cli import app

        return app(*arguments, **settings)

    program(app, "kvrepro")


if __name__ == "__main__":
    __package__ = ""  # programs that look up their name find `kvrepro`, as behind the console script
    main()
