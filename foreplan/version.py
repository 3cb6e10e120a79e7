"""The version of foreplan, which plan files and measurements are of."""

VERSION = "0.1.0"
