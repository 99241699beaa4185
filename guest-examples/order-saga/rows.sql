INSERT INTO stock (sku, units) VALUES ('apple', 10);
