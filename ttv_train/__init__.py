"""Text-to-video diffusion training: from clips to a trained video transformer on one to thousands of accelerators."""

__version__ = "0.1.0"
