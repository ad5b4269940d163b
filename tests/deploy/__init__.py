"""Deployment files, and octavo on platforms that deploy it."""
