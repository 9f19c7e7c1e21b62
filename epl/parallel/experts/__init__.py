"""Experts over ranks: which rows a rank has, how rows travel to their experts and home again, and the arithmetic of both."""
