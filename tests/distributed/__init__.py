"""Tests that start several gloo ranks on loopback."""
