DO $$
DECLARE
    f regprocedure;
BEGIN
    FOR f IN {functions}
    LOOP
        EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO {owner}, %I', f, {login});
        EXECUTE format('REVOKE EXECUTE ON FUNCTION %s FROM PUBLIC', f);
    END LOOP;
END $$
