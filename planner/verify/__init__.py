"""What proves a plan, and what makes a problem one that can be planned."""
