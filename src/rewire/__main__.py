"""``python -m rewire`` is ``rewire``."""

from rewire.cli import app

if __name__ == "__main__":
    app(prog_name="rewire")
