"""The mathematics of one matrix, one optimizer a module.  Nothing here knows of process groups."""
