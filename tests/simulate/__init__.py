"""What octavo/simulate promises."""
