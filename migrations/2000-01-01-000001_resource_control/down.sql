DROP FUNCTION resource_control.lock_key(text);
DROP SCHEMA resource_control;
