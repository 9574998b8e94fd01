"""Lightning callbacks. ``scu`` alone joins the module and a controller."""
