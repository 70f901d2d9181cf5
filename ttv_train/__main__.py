"""``python -m ttv_train``, which launchers start."""

from ttv_train.cli import entry_point

if __name__ == "__main__":
    entry_point()
