"""Fakes for what a real server cannot be made to do on command. Everything else is tested on the real one."""
