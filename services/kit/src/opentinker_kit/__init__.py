"""Plumbing that every OpenTinker service uses."""
