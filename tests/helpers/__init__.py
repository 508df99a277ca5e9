"""What several tests need. Test files import from here, and from no other test file."""
