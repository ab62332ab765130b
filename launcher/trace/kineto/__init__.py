"""Reads a Kineto trace file of any writer into columns."""
