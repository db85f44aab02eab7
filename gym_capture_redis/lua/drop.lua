-- Retires exactly the snapshot that was consumed; a tombstone stays.
-- 1  snapshot id
-- 2  version
-- 3  seconds that the tombstone stays
-- Reply    OK (retired, now or before) | STALE (another snapshot, newer, or never frozen)
-- Repeat   safe: OK
local state, err = load_state()
if err then return err end
if not state or state.status == 'open' or state.snapshot == ''
    or state.snapshot ~= arg(1) or tonumber(state.version) ~= tonumber(arg(2)) then
  return reply('STALE', state)
end
if state.status == 'frozen' then retire(state, arg(3)) end
return reply('OK', state)
