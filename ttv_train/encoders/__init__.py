"""Frozen encoders: videos and captions to what the diffusion model trains on."""
