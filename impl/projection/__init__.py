"""What a plan or a schedule costs on a machine that is described, not used."""
