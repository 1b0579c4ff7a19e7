"""The world behind HTTP: launching, talking to and stopping a real server."""
