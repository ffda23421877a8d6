"""Where other packages meet this one; each module needs its package, and nothing else imports them."""
