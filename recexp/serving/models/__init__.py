"""The Python-backend models of the repository; they run inside the server's stub processes."""
