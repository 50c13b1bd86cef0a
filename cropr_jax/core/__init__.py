"""What every floor above builds on: routing, schedules, attention, layers, fusion, random keys."""
