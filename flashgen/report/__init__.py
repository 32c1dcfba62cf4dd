"""What people look at: explanations, the HTML report, calibration, plots."""
