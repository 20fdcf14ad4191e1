"""What tests share with one another and with the benches."""
