DROP TABLE charge;
