DROP TABLE booking;
