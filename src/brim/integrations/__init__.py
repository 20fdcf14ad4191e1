"""Where other libraries call brim; none of them is imported unless it is used."""
