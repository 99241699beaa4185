INSERT INTO stock (sku, available) VALUES ('apple', 10), ('pear', 2);
