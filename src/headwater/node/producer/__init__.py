"""The DCP producer, sans-IO: from the bucket's changes to the frames of each stream."""
