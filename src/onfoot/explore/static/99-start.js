// The last file: every part of the page is defined and registered by now.

start();
