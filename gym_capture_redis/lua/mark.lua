-- Marks the rollout incomplete: it lost a call.
-- 1  incarnation to give the rollout if it is new
-- 2  incarnation of the attempt that lost the call, or '' for whichever is there
-- 3  call, or '' for the rollout as a whole
-- 4  reason: marked (by its worker), lost (by the server, after it was acknowledged)
-- 5  id of the mark, 16 hex digits: whoever makes the same mark again says the same id
-- Reply    OK | SAME (this very mark was made already) | RETIRED (also: another attempt)
-- Repeat   safe: SAME
local expected, call, mark_id = arg(2), arg(3), arg(5)
local state, err, known = load_state('f:' .. call)
if err then return err end
if state and state.status == 'retired' then return reply('RETIRED', state) end
if expected ~= '' and (not state or state.incarnation ~= expected) then return reply('RETIRED', state) end
local failure = known[1]
if failure and string.find(failure, ' ' .. mark_id, 1, true) then return reply('SAME', state) end
state = state or new_state(arg(1))
keep(state)
mark_failure(state, call, arg(4), mark_id)
return reply('OK', state)
