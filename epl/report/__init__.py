"""What epl tells the user: notices and warnings, each once, and what a schedule did, drawn."""
