"""Methods of this project: basis rotation and its variants."""
