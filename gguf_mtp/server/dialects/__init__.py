"""Other vendors' endpoints: translations into a chat request, and of its answer back."""
