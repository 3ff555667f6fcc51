"""From differences to what is to blame."""
