"""Role processes: the commands `gateway`, `conductor`, `worker`, `provision`, and the setup of a process."""
