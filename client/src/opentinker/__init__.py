"""OpenTinker: train language-model agents by reinforcement learning, from plain Python."""
